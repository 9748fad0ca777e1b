"""Reading fields of a JSON document, each checked, each error naming the field's path."""

from __future__ import annotations

from typing import Any, TypeVar

from planner.errors import PlanFileError

_Choice = TypeVar("_Choice", bound=str)


class Reader:
    """One JSON object of a plan's file and the way to it."""

    __slots__ = ("_fields", "_file", "_path")

    def __init__(self, value: object, file: str, path: str = "") -> None:
        self._file, self._path = file, path
        if not isinstance(value, dict):
            raise self._wrong(path or "the document", "an object", value)
        self._fields: dict[str, Any] = value

    def value(self, key: str) -> Any:
        """Any JSON value."""
        if key not in self._fields:
            raise PlanFileError(f"{self._file} is no plan: the field {self._at(key)} is missing; "
                                "plan again and save to a new file")
        return self._fields[key]

    def text(self, key: str) -> str:
        """A string."""
        return self._typed(key, str, "text")

    def boolean(self, key: str) -> bool:
        """True or false."""
        return self._typed(key, bool, "true or false")

    def integer(self, key: str) -> int:
        """A whole number, not below 0."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(self._at(key), "a whole number >= 0", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number or null."""
        return None if self.value(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """A number, not below 0."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise self._wrong(self._at(key), "a number >= 0", value)
        return float(value)

    def change(self, key: str) -> float:
        """A difference as a fraction of what it is a difference to, which is not lost as a whole.
        """
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= -1:
            raise self._wrong(self._at(key), "a number > -1", value)
        return float(value)

    def choice(self, key: str, choices: tuple[_Choice, ...]) -> _Choice:
        """One of `choices`."""
        value = self.value(key)
        for choice in choices:
            if value == choice:
                return choice
        raise self._wrong(self._at(key), " or ".join(map(repr, choices)), value)

    def object(self, key: str) -> Reader:
        """An object with fields of its own."""
        return Reader(self.value(key), self._file, self._at(key))

    def optional_object(self, key: str) -> Reader | None:
        """An object or null."""
        return None if self.value(key) is None else self.object(key)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object with free keys."""
        return self._typed(key, dict, "an object")

    def objects(self, key: str) -> list[Reader]:
        """A list of objects."""
        return [Reader(item, self._file, f"{self._at(key)}[{position}]")
                for position, item in enumerate(self._typed(key, list, "a list"))]

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        return self._items(key, str, "a list of texts")

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        return self._items(key, int, "a list of whole numbers")

    def booleans(self, key: str) -> tuple[bool, ...]:
        """A list of true and false."""
        return self._items(key, bool, "a list of true and false")

    def _items(self, key: str, kind: type, expected: str) -> tuple[Any, ...]:
        items = self._typed(key, list, expected)
        for item in items:
            if not isinstance(item, kind) or (kind is int and isinstance(item, bool)):
                raise self._wrong(self._at(key), expected, items)
        return tuple(items)

    def _typed(self, key: str, kind: type, expected: str) -> Any:
        value = self.value(key)
        if not isinstance(value, kind):
            raise self._wrong(self._at(key), expected, value)
        return value

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _wrong(self, path: str, expected: str, value: object) -> PlanFileError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return PlanFileError(f"{self._file} is no plan: expected {expected} as {path}, got "
                             f"{shown}; plan again and save to a new file")

"""Bytes by category: dataclasses whose fields are also the keys of a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields


class ByCategory(Mapping[str, int]):
    """Base of frozen dataclasses of byte counts: a mapping from field to bytes, in the order of the
    fields; the categories sum to the peak."""

    __slots__ = ()

    def __getitem__(self, category: str) -> int:
        if category not in self:
            raise KeyError(category)
        return getattr(self, category)

    def __contains__(self, category: object) -> bool:
        return any(category == name for name in self)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(tuple(self.values()))

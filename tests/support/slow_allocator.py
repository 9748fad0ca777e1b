"""Torch's caching allocator, implemented again from its documentation: every segment is a list of
blocks, and every query looks at all of them."""

from dataclasses import dataclass, field

MIB = 2 ** 20


@dataclass
class Piece:
    size: int
    owner: int | None = None
    """Number of the request that owns it; `None`: nobody."""


@dataclass
class Stretch:
    """A segment."""

    small: bool
    chunks: list[Piece] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.chunks)


class SlowAllocator:
    """The allocator; the caller numbers the requests."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.segments: list[Stretch] = []

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(piece.size for segment in self.segments for piece in segment.chunks
                   if piece.owner is not None)

    def allocate(self, number: int, size: int) -> None:
        while size % 512:
            size += 1
        small = size <= MIB
        candidates = [(piece.size, place, position)
                      for place, segment in enumerate(self.segments) if segment.small == small
                      for position, piece in enumerate(segment.chunks)
                      if piece.owner is None and piece.size >= size]
        if self.expandable:  # a block that could grow at its end counts as endless
            others = [(size, place, position) for size, place, position in candidates
                      if position + 1 < len(self.segments[place].chunks)]
            if others and min(candidates) not in others:
                candidates = [min(others)]
        if not candidates:
            candidates = [self._reserve(size, small)]
        _, place, position = min(candidates)
        chunks = self.segments[place].chunks
        piece = chunks[position]
        rest = piece.size - size
        if (rest >= 512) if small or self.expandable else (rest > MIB):
            chunks.insert(position + 1, Piece(rest))
            piece.size = size
        piece.owner = number

    def release(self, number: int) -> None:
        for segment in self.segments:
            for piece in segment.chunks:
                if piece.owner == number:
                    piece.owner = None
            merged: list[Piece] = []
            for piece in segment.chunks:
                if merged and merged[-1].owner is None and piece.owner is None:
                    merged[-1].size += piece.size
                else:
                    merged.append(piece)
            segment.chunks = merged

    def _reserve(self, size: int, small: bool) -> tuple[int, int, int]:
        page = 2 * MIB if small else 20 * MIB
        if self.expandable:
            if not any(segment.small == small for segment in self.segments):
                self.segments.append(Stretch(small))
            place = next(place for place, segment in enumerate(self.segments)
                         if segment.small == small)
            chunks = self.segments[place].chunks
            if not chunks or chunks[-1].owner is not None:
                chunks.append(Piece(0))
            while chunks[-1].size < size:
                chunks[-1].size += page
            return chunks[-1].size, place, len(chunks) - 1
        length = page
        if not small and size >= 10 * MIB:
            length = 2 * MIB
            while length < size:
                length += 2 * MIB
        self.segments.append(Stretch(small, [Piece(length)]))
        return length, len(self.segments) - 1, 0

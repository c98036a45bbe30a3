"""ARC word for word from figure 4 of the paper, on plain lists: slow, and without pins. The oracle of ArcPolicy."""

from __future__ import annotations


class PaperArc:
    """Lists are oldest first: the LRU page is at index 0, the MRU end is the end."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.deleted: list[int] = []

    def request(self, x: int) -> bool:
        """One page request; whether it was a hit. `deleted` grows by the page that left the cache, if one did."""
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:  # case II
            delta = 1.0 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # case III
            delta = 1.0 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0.0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # case IV
            self.make_room()
            self.t1.append(x)
        return False

    def make_room(self) -> None:
        total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace(None)
            else:
                self.deleted.append(self.t1.pop(0))
        elif total >= self.c:
            if total == 2 * self.c:
                self.b2.pop(0)
            self.replace(None)

    def replace(self, x: int | None) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.deleted.append(self.t1[0])
            self.b1.append(self.t1.pop(0))
        else:
            self.deleted.append(self.t2[0])
            self.b2.append(self.t2.pop(0))

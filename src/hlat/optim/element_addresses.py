"""Where the elements of a local tensor are in the canonical tensors, line by line.

    LocalParameter --lines_of--> Lines: the tensor as (L, length), and for each line its canonical tensor, row and column

A line is consecutive elements of one row of one canonical tensor: a row of a matrix, or a part of a vector. Element j
of a line is at column ``column + j`` there. So a kernel knows nothing of layouts, and whole, tensor-parallel, sharded
and fused parameters find the same address for the same element.
"""

import math
from dataclasses import dataclass

import torch

from hlat.model import LocalParameter


@dataclass(frozen=True)
class ElementAddresses:
    """A local tensor as lines; ``L`` of them, which may be none.

    Attributes:
        length: elements of a line.
        rows_L, columns_L: the place of a line's first element in its canonical tensor, int32; a vector is row 0.
        names_L: its canonical tensor, int32: an index into the names of everything that is stepped together.
    """

    length: int
    rows_L: torch.Tensor
    columns_L: torch.Tensor
    names_L: torch.Tensor

    @property
    def count(self) -> int:
        """How many lines."""
        return self.rows_L.shape[0]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A local tensor (weights, gradients or moments), which has to be contiguous, as (L, length)."""
        return tensor.view(self.count, self.length)

    def part(self, start: int, stop: int) -> "ElementAddresses":
        """Some of the lines."""
        rows, columns, names = (table[start:stop] for table in (self.rows_L, self.columns_L, self.names_L))
        return ElementAddresses(self.length, rows, columns, names)


def address_elements(held: LocalParameter, first_name: int = 0) -> ElementAddresses:
    """The lines of what is held of a parameter, on its device.

    Args:
        held: the parameter.
        first_name: the index of the first of its layout's canonical names; the others follow.
    """
    layout, tensor = held.layout, held.tensor
    runs = list(layout.runs(held.first_row, held.first_row + tensor.shape[0]))
    numbers = {part.name: first_name + index for index, part in enumerate(layout.tensors)}
    matrix = bool(layout.columns)
    length = math.prod(layout.columns) if matrix else math.gcd(*(run.count for run in runs)) or 1
    tables: list[torch.Tensor] = [torch.empty(3, 0, dtype=torch.int64)]
    for run in runs:
        if matrix:
            rows = torch.arange(run.canonical_start, run.canonical_start + run.count)
            columns = torch.full_like(rows, layout.first_column)
        else:
            columns = torch.arange(run.canonical_start, run.canonical_start + run.count, length)
            rows = torch.zeros_like(columns)
        assert run.canonical_start + run.count <= 1 << 31 > layout.first_column, "words of 32 bits"
        tables.append(torch.stack((rows, columns, torch.full_like(rows, numbers[run.name]))))
    table_3L = torch.cat(tables, dim=1)
    return ElementAddresses(length, *table_3L.to(torch.int32).to(tensor.device).unbind())

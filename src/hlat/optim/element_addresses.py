"""Addresses of a local tensor's elements in the canonical tensors, line by line.

    LocalParameter --address_elements--> ElementAddresses: the tensor as (L, length), and the canonical tensor, row and
        column of each line

A line is a range of elements of one row of one canonical tensor: a row of a matrix, or a range of a vector. Element j
of a line has column ``column + j`` there. So kernels do not depend on layouts: an element has the same address in
complete, tensor-parallel, sharded and fused parameters.
"""

import math
from dataclasses import dataclass

import torch

from hlat.model import LocalParameter


@dataclass(frozen=True)
class ElementAddresses:
    """Addresses of the L lines (possibly none) of a local tensor.

    Attributes:
        length: elements of a line.
        rows_L, columns_L: row and column of each line's first element in its canonical tensor, int32; vectors have row
            0.
        names_L: canonical tensor of each line, int32: an index into the names of all parameters of the optimizer.
    """

    length: int
    rows_L: torch.Tensor
    columns_L: torch.Tensor
    names_L: torch.Tensor

    @property
    def count(self) -> int:
        """Number of lines."""
        return self.rows_L.shape[0]

    def view_lines(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a contiguous local tensor (weights, gradients or moments) as (L, length)."""
        return tensor.view(self.count, self.length)

    def slice_lines(self, start: int, stop: int) -> "ElementAddresses":
        """Return the addresses of the lines ``start <= line < stop``."""
        rows, columns, names = (table[start:stop] for table in (self.rows_L, self.columns_L, self.names_L))
        return ElementAddresses(self.length, rows, columns, names)


def address_elements(parameter: LocalParameter, first_name: int = 0) -> ElementAddresses:
    """Compute the addresses of the elements of a local parameter, on its device.

    Args:
        parameter: the local parameter.
        first_name: index of the first canonical name of its layout; the others follow.
    """
    layout, tensor = parameter.layout, parameter.tensor
    runs = list(layout.runs(parameter.first_row, parameter.first_row + tensor.shape[0]))
    numbers = {canonical.name: first_name + index for index, canonical in enumerate(layout.tensors)}
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
        assert run.canonical_start + run.count <= 1 << 31 > layout.first_column, "addresses have 32 bits"
        tables.append(torch.stack((rows, columns, torch.full_like(rows, numbers[run.name]))))
    table_3L = torch.cat(tables, dim=1)
    return ElementAddresses(length, *table_3L.to(torch.int32).to(tensor.device).unbind())

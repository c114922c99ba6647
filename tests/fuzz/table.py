"""All rows: one per kind of layer."""

from tests.fuzz import (
    rows_elementwise,
    rows_images,
    rows_linear,
    rows_losses,
    rows_normalization,
    rows_sequences,
    rows_shape,
    rows_sums,
)
from tests.fuzz.row import Row

LAYERS: dict[str, Row] = {
    **rows_elementwise.ROWS,
    **rows_shape.ROWS,
    **rows_sums.ROWS,
    **rows_images.ROWS,
    **rows_normalization.ROWS,
    **rows_linear.ROWS,
    **rows_sequences.ROWS,
}
LOSSES: dict[str, Row] = rows_losses.ROWS
TABLE: dict[str, Row] = {**LAYERS, **LOSSES}

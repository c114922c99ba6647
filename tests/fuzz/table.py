"""All rows: one per kind of layer."""

from tests.fuzz import (
    rows_elementwise,
    rows_images,
    rows_losses,
    rows_normalization,
    rows_sequences,
    rows_shape,
)
from tests.fuzz.row import Row

LAYERS: dict[str, Row] = {
    **rows_elementwise.ROWS,
    **rows_shape.ROWS,
    **rows_images.ROWS,
    **rows_normalization.ROWS,
    **rows_sequences.ROWS,
}
LOSSES: dict[str, Row] = rows_losses.ROWS
TABLE: dict[str, Row] = {**LAYERS, **LOSSES}

"""Names of the arrays of media items and of the rows that encoders make of them, for processes that load no torch."""

from __future__ import annotations

POSITION_ARRAY = "positions"  # int32 [tokens + 1, 3], absolute
PATCHES = "patches"  # uint8 [tokens, patches of a block, values of a patch]
GRID = "grid"  # int32 [tokens, 4]: y, x of a block's first patch, height and width of the image, all in patches
WINDOW_END = "window_end"  # int32 [tokens]: where the token's window ends, in tokens of the item
BLOCK_ORDER = "block_order"  # int32 [tokens]: which token has the block at each place of the image
AHEAD_ARRAY = "ahead"  # int32 [tokens]: how many later tokens of the item a token attends to
EMBEDDED = "embedded"  # floating [tokens, width of a row]: rows of the encoder, in place of what it computes them from
MEDIA_ROWS = "media_rows"  # the state group that the encoder fills

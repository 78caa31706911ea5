"""Sizes that ops and kernels of LoRA adapters agree on."""

MAX_PARTS = 4  # linears that were merged into one
COLUMNS = 16  # outputs of a block of B
TILE = 16  # tokens of one adapter that a kernel multiplies at once

"""How the EAGLE-3 head of `smollm2_eagle3` was trained: `tests/support/train_draft_head.py`."""

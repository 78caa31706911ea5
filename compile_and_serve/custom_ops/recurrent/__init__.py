"""Ops with recurrent state: linear attention (Gated DeltaNet, KDA, Mamba-2) and short convolutions."""

"""Linears over weights of 8 bits a value."""

"""Mixture of experts: routing, and the products of the experts that each token is routed to."""

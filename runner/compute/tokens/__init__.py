"""Tokens: from logits to the next token of each request."""

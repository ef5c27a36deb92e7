"""Between processes and ranks: messages and their frames, key challenge, collectives, shared host memory."""

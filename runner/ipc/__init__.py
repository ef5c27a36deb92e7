"""What passes between processes and ranks: frames, key challenge, collectives, shared host memory."""

"""OpenAI's protocol: what requests may be, and the bodies that answer them."""

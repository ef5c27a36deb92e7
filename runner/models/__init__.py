"""Model families, found by Hugging Face `model_type`: a file each, or a row of `llama.VARIANTS`."""

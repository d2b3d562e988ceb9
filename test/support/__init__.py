"""What tests share: tiny models, and real SGLang servers on the CPU that start in seconds."""

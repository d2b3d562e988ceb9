"""What tests share: tiny models, real SGLang servers on the CPU, and the warm parent that makes those quick to start."""

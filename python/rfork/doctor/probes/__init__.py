"""What the doctor looks at, one module each. `probe(config)` returns findings, and may raise, crash or hang."""

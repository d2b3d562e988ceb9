"""R-Fork's engine-neutral core: it moves a running instance's weights into a new one and proves that they are equal."""

__version__ = "0.1.0"

"""The patch set that joins R-Fork to SGLang; installed and imported as `sglang_rfork`.

The folder is named as SGLang's own so that each file sits where its counterpart sits upstream.
"""

if __name__ == "sglang":
    raise ImportError(
        f"{__file__} was imported as `sglang`, but it is R-Fork's patch set (`sglang_rfork`), not SGLang: "
        "the folder `python/` of an R-Fork checkout is on sys.path, or is the working directory, and hides the SGLang "
        "that is installed. Take it off PYTHONPATH, or run from another directory."
    )

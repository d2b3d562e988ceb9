"""Write the lock of an environment that works: every version in it, less what only a GPU needs.

    $ .venv/bin/python -m pip install 'sglang==0.5.23' …      # whatever is to change
    $ python3 tools/lock.py .venv/bin/python > requirements/sglang-0.5.23.txt

The lock is installed with `--no-deps`: what is left out below is what SGLang's own requirements would pull in again.
"""

import subprocess
import sys

# A third of the 10 GB that SGLang brings: kernels, and what compiles them. Without a GPU SGLang looks for them, finds
# that they don't work, and goes on as where they aren't installed. torch's CUDA libraries stay: it links to them.
GPU_ONLY = {
    "flashinfer-cubin",
    "flashinfer-python",
    "nccl-extensions",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvdisasm",
    "nvidia-cudnn-frontend",
    "nvidia-cusolver",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "nvidia-mathdx",
    "nvidia-nvvm",
    "nvshmem4py-cu13",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "tilelang",
    "tokenspeed-triton",
    "z3-solver",
}
OURS = {"sglang-rfork", "sglang-host-cpu"}
TOOLS_OF_A_VENV = {"pip", "wheel"}

HEADER = """\
# Made by tools/lock.py for Python 3.11 on Linux x86_64. Install it with --no-deps, as tools/setup.py does: packages
# that only a GPU needs are left out.
"""


def main(python: str) -> None:
    freeze = [python, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    pins = subprocess.run(freeze, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    print(HEADER, end="")
    for pin in sorted(pins, key=str.lower):
        name, equals, _ = pin.partition("==")
        if not equals:
            raise SystemExit(f"{python} has a package that no version can name: {pin}")
        if name.lower() not in GPU_ONLY | OURS | TOOLS_OF_A_VENV:
            print(pin)


if __name__ == "__main__":
    main(*sys.argv[1:])

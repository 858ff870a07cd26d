"""Build the CUDA without a GPU for the torch that runs this.

    python -m tests.cuda.build

The sources in `runtime/` define what torch needs an answer of. All else that the libraries of torch and Triton leave
undefined becomes a stub that returns 0, so a new torch needs no new source. Only g++ is needed.
"""

import pathlib
import re
import subprocess
import sysconfig
import tempfile

SOURCES = pathlib.Path(__file__).with_name("runtime")
SITE = pathlib.Path(sysconfig.get_paths()["purelib"])
WANTED = re.compile(r" U ((?:cuda[A-Z]|__cuda|cublas|nccl|cu[A-Z])\w+)")
OF_DRIVER = re.compile(r"cu[A-Z](?!BLAS)")
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-w"]  # torch's headers differ between versions, so warnings are off


def libraries(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Build the libraries into a folder, if they are older than their sources, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {"driver": folder / "libcuda.so.1", "runtime": folder / "libcudart_log.so"}
    results["management"] = folder / "libnvidia-ml.so.1"
    sources = [pathlib.Path(__file__), *SOURCES.iterdir()]
    newest = max(source.stat().st_mtime for source in sources)
    if all(path.exists() and path.stat().st_mtime > newest for path in results.values()):
        return results
    wanted = list_undefined()
    driver = {name for name in wanted if OF_DRIVER.match(name)}
    management = {name for name in wanted if name.startswith("nvml")}
    runtime = ["cudart.cpp", "cublas.cpp", "nccl.cpp"]
    return {
        "driver": library(results["driver"], ["driver.cpp"], driver),
        "runtime": library(results["runtime"], runtime, wanted - driver - management),
        "management": library(results["management"], ["nvml.cpp"], management),
    }


def list_undefined() -> set[str]:
    """Name the functions that the libraries of torch and Triton expect from CUDA's."""
    results: set[str] = set()
    for pattern in ("lib*cuda*.so", "*nvrtc*.so", "libtorch_python.so"):
        for path in SITE.glob(f"torch/lib/{pattern}"):
            symbols = _output("nm", "-D", "--undefined-only", str(path))
            results |= set(WANTED.findall(re.sub(r"@.*", "", symbols)))
    for path in SITE.glob("torch/lib/libc10_cuda.so"):  # the allocator looks functions of the driver up by name
        results |= {name.decode() for name in re.findall(rb"\0((?:cu|nvml)[A-Z]\w+)(?=\0)", path.read_bytes())}
    for path in SITE.glob("triton/backends/nvidia/*.c"):
        results |= set(re.findall(r"\b(cu[A-Z]\w+)\b", path.read_text()))
    return results


def library(path: pathlib.Path, sources: list[str], wanted: set[str]) -> pathlib.Path:
    """Compile sources into a library, with a stub for each function that is wanted and not defined."""
    headers = [next(SITE.glob("nvidia/**/driver_types.h")).parent, SITE / "triton/backends/nvidia/include"]
    with tempfile.TemporaryDirectory() as temporary:
        objects = [pathlib.Path(temporary, source).with_suffix(".o") for source in sources]
        for source, target in zip(sources, objects, strict=True):
            _output(
                "g++", *FLAGS, *(f"-I{folder}" for folder in headers), "-c", str(SOURCES / source), "-o", str(target)
            )
        defined = set(re.findall(r" [TtWD] (\w+)", _output("nm", *map(str, objects))))
        stubs = pathlib.Path(temporary, "stubs.cpp")
        stub = 'extern "C" __attribute__((visibility("default"))) int {}() {{ return 0; }}\n'
        stubs.write_text("".join(map(stub.format, sorted(wanted - defined))))
        shared = ["-shared", "-fvisibility=hidden", f"-Wl,-soname,{path.name}"]
        _output("g++", *FLAGS, *shared, *map(str, objects), str(stubs), "-o", str(path), "-ldl")
    return path


def _output(*command: str) -> str:
    """Run a command and return its output; its errors are shown."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    for built in libraries(pathlib.Path(".venv-cuda/runtime")).values():
        print(built)

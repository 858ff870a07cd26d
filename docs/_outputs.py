"""Run the examples, and keep the end of what each prints for its page on the site.

python docs/_outputs.py
"""

import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "_outputs"
COMMANDS = {
    "zero_by_hand": "",
    "train_gpt": "--steps 60 --stage 3 --out {folder}/run",
    "parallel_mlp": "",
    "hf_model": "--steps 4",
    "finetune_hf": "--steps 20 --out {folder}/run",  # finetune.py needs a model of yours
}


def main() -> None:
    """Run all, each in a folder of its own for what it writes."""
    FOLDER.mkdir(exist_ok=True)
    for name, words in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [f"examples/{name}.py", *words.format(folder=folder).split()]
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, errors="replace"
            )
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        shown = " ".join(["python", *command]).replace(folder, "/tmp")
        lines = [line.rstrip() for line in done.stdout.replace(folder, "/tmp").splitlines()]
        more = ["..."] if len(lines) > 24 else []
        (FOLDER / f"{name}.txt").write_text("\n".join([f"$ {shown}", *more, *lines[-24:]]) + "\n")
        print(name)


if __name__ == "__main__":
    main()

"""Write the lists of optimizers into the pages: `python -m tests.optim`."""

from tests.optim.pages import ROOT, pages

for path, text in pages().items():
    if path.read_text() != text:
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")

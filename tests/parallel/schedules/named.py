"""The named schedules, each with the fewest stages per rank that it takes: laws of pipelines run over them."""

from fzero.parallel.schedules._named_schedules import NAMES

NAMED = {name: row.min_stages for name, row in NAMES.items()}

"""The report's page: everything in one file."""

from collections.abc import Sequence
from html import escape

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
nav a { margin-right: 1rem; } a { color: #1f5fa8; text-decoration: none; }
table { border-collapse: collapse; margin: 0.8rem 0; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 0.2rem 0.9rem 0.2rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
img { max-width: 100%; margin: 0.3rem 0.6rem 0.3rem 0; vertical-align: top; } .note { color: #666; }
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    links = "".join(f'<a href="#{place}">{escape(head)}</a>' for place, (head, _) in enumerate(sections))
    body = "".join(f'<h2 id="{place}">{escape(head)}</h2>{text}' for place, (head, text) in enumerate(sections))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1><nav>{links}</nav>{body}</body></html>\n"
    )

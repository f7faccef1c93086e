"""How the page looks: on a screen, light or dark, and on paper."""

LIGHT = """
  --paper: #ffffff; --panel: #f5f6f8; --ink: #1c2127; --soft: #5b6570; --rule: #d9dee3;
  --device: #235d8f; --ram: #5b97c4; --disk: #a3c6df; --new: #8fb39a; --missed: #c4502a;
  --cannot: #9da6ae; --diverged: #d9a441; --apart: #cfd5da; --move: #8268a8; --reader: #b8a9c9;
"""
DARK = """
  --paper: #14171b; --panel: #1c2126; --ink: #e3e7eb; --soft: #98a2ac; --rule: #323a42;
  --device: #5b9bd0; --ram: #3f76a3; --disk: #2c5170; --new: #6d9579; --missed: #e0714a;
  --cannot: #6c757e; --diverged: #c2923a; --apart: #454d55; --move: #a78fd0; --reader: #7d6f95;
"""
SHAPES = """
svg text { font: 12px system-ui, "Segoe UI", Roboto, sans-serif; fill: var(--ink);
  font-variant-numeric: tabular-nums; }
svg text.soft { fill: var(--soft); }
.axis { stroke: var(--soft); stroke-width: 1; }
.grid { stroke: var(--rule); stroke-width: 1; }
.limit { stroke: var(--missed); stroke-width: 1.5; stroke-dasharray: 5 4; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.device-line, .running-line { stroke: var(--device); }
.ram-line { stroke: var(--new); } .waiting-line { stroke: var(--missed); }
.total { fill: var(--soft); } .pale { opacity: .38; }
.hit, .device, .running { fill: var(--device); }
.ram { fill: var(--ram); } .disk { fill: var(--disk); } .new { fill: var(--new); }
.missed, .waiting { fill: var(--missed); } .cannot, .step { fill: var(--cannot); }
.diverged, .preempted { fill: var(--diverged); } .apart, .unknown { fill: var(--apart); }
.prefill { fill: var(--missed); } .move { fill: var(--move); }
.reader { fill: var(--reader); }
.better { fill: var(--device); stroke: var(--device); }
.worse { fill: var(--missed); stroke: var(--missed); }
.noise { stroke-width: 2.5; }
.even { fill: var(--cannot); stroke: var(--cannot); }
"""
"""What plots are made of."""
STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 64rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }}
h1 {{ font-size: 1.5rem; font-weight: 600; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.15rem; font-weight: 600; margin: 2.75rem 0 .5rem; padding-top: .75rem;
  border-top: 1px solid var(--rule); }}
h3 {{ font-size: 1rem; font-weight: 600; margin: 1.75rem 0 .35rem; }}
p {{ margin: .35rem 0; max-width: 46rem; }}
.soft, .note {{ color: var(--soft); }}
.note {{ font-size: .87rem; }}
.remarks {{ border-left: 3px solid var(--missed); padding-left: .75rem; margin: 1rem 0; }}
.facts {{ display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px;
  margin: 1.5rem 0; background: var(--rule); border: 1px solid var(--rule); }}
.facts div {{ background: var(--paper); padding: .7rem .85rem; }}
.facts b {{ display: block; font-size: 1.3rem; font-weight: 600;
  font-variant-numeric: tabular-nums; }}
.facts span {{ color: var(--soft); font-size: .82rem; line-height: 1.3; display: block; }}
figure {{ margin: 1rem 0; }}
figcaption {{ color: var(--soft); font-size: .87rem; margin-top: .25rem; max-width: 46rem; }}
svg {{ display: block; width: 100%; height: auto; }}
{SHAPES}.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .22rem .7rem .22rem 0; text-align: right; white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 500; vertical-align: bottom; white-space: normal;
  border-bottom: 1px solid var(--rule); }}
th.text, td.text {{ text-align: left; padding-right: 1.2rem; }}
th + th.text, td + td.text {{ padding-left: .3rem; }}
tr.first td {{ border-top: 1px solid var(--rule); }}
tr:hover td {{ background: var(--panel); }}
@media (max-width: 40rem) {{ .facts {{ grid-template-columns: 1fr 1fr; }} }}
@media print {{
  :root {{ color-scheme: light; {LIGHT} }}
  @page {{ margin: 14mm; }}
  html {{ font-size: 12px; }}
  body {{ padding: 0; max-width: none; font-size: 12px; }}
  figure, .facts, .short, tr, h2, h3 {{ break-inside: avoid; }}
  h2, h3, thead {{ break-after: avoid; }}
  .scroll {{ overflow: visible; }}
  table {{ font-size: 9.5px; }}
  th, td {{ padding-right: .7rem; }}
  * {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
}}
"""
"""``@page`` may not lie inside ``@media`` in old browsers, which then skip it alone."""


def standalone(picture: str) -> str:
    """One plot as a file of its own, light or dark as its surroundings."""
    start = picture.index(">") + 1
    colours = f":root {{{LIGHT}}} @media (prefers-color-scheme: dark) {{ :root {{{DARK}}} }}"
    paper = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    return f"{picture[:start]}<style>{colours}{SHAPES}</style>{paper}{picture[start:]}\n"

"""Print docs/ane-rules.md, the placement rules for people, from the rules themselves.

python -m portable_coreml.judge.rules > docs/ane-rules.md
"""

from __future__ import annotations

from portable_coreml.judge.limits import SCORES, WEIGHT_BYTES, listed
from portable_coreml.judge.rule import SEVERITIES, Rule
from portable_coreml.judge.rules import RULES


def rules_page() -> str:
    """Return the whole page in Markdown, errors first."""
    head = (
        "# What keeps a program on the Neural Engine\n\n"
        "This page is written from `portable/portable_coreml/judge/rules/` by "
        "`python -m portable_coreml.judge.rules`; change the rules, not this page.\n\n"
        "Nothing on this page was measured by this project. Confidence: A = Apple says it; B = measured by two "
        "parties, or by one with published method and data; C = one party, one machine; D = contradicted. The rules "
        "predict what is *eligible*; what Core ML's dispatcher then chooses also depends on its estimate of cost. A "
        "rule that names no systems or chips is said to hold for all systems and chips.\n"
    )
    return head + "".join(
        _section(rule) for rule in sorted(RULES.values(), key=lambda rule: SEVERITIES.index(rule.severity))
    )


def _section(rule: Rule) -> str:
    scope = "".join(f"; {name}: {names}" for name, names in (("systems", rule.systems), ("chips", rule.chips)) if names)
    lines = [
        f"\n## {rule.id}: {rule.title}\n",
        f"- severity: {rule.severity}; confidence: {rule.confidence}{scope}",
        f"- instead: {rule.remedy}",
        f"- sources: {'; '.join(rule.sources)}",
    ]
    for limit in (limit for limit in (*WEIGHT_BYTES, *SCORES) if limit.rule == rule.id):
        said = f"; {limit.remark}" if limit.remark else ""
        told = f"{listed(limit.systems)}: {limit.most} {'scores' if limit in SCORES else 'bytes'}"
        lines.append(f"- {told}; confidence: {limit.confidence} ({'; '.join(limit.sources)}{said})")
    if rule.contested:
        lines.append(f"- contested: {rule.contested}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(rules_page(), end="")

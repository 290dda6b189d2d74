"""The report of a campaign: pass@k with confidence intervals, and a page that opens offline.

The caller fills :class:`Facts`; :func:`write_report` writes the page and its numbers as JSON.
"""

from prefixkit.evaluation.report.curves import curves_of
from prefixkit.evaluation.report.files import as_json, write_report
from prefixkit.evaluation.report.page import render_page
from prefixkit.evaluation.report.pass_at_k import Curve, Point, estimate, ks_up_to, pass_at_k_curve
from prefixkit.evaluation.report.run_summary import (
    OUTCOMES,
    Branch,
    Candidate,
    Draw,
    Facts,
    Group,
    Picture,
    Problem,
    Progress,
    Saved,
    SavedRow,
)

__all__ = [
    "OUTCOMES",
    "Branch",
    "Candidate",
    "Curve",
    "Draw",
    "Facts",
    "Group",
    "Picture",
    "Point",
    "Problem",
    "Progress",
    "Saved",
    "SavedRow",
    "as_json",
    "curves_of",
    "estimate",
    "ks_up_to",
    "pass_at_k_curve",
    "render_page",
    "write_report",
]

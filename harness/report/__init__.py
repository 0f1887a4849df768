"""The interactive report: figures and page, no arithmetic."""

from harness.report.document import ReportError
from harness.report.page import html_page
from harness.report.sides_page import sides_page

__all__ = ["ReportError", "html_page", "sides_page"]

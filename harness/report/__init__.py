"""The interactive report: figures and page, no arithmetic."""

from harness.report.page import ReportError, html_page

__all__ = ["ReportError", "html_page"]

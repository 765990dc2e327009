"""Linear layers with derivatives of their own: `linear`, `dot_general`, `grouped_linear`, delayed scaling."""

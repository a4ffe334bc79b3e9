"""Engines that take their weights from a broker. Nothing here is imported before an engine loads its plug-ins."""

"""Engines that load their weights from a broker. Imported only when an engine loads its plug-ins."""

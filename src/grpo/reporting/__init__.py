"""The parts of the report: what is read, compared, drawn and written down."""

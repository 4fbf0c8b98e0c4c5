"""Storage backends of records. A new backend is a file here, and a location in `embedrock.table` that makes it."""

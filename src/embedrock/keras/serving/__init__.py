"""Models without Embedrock: rows as variables of TensorFlow, looked up by its own operations."""

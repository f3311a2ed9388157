"""Generation and training back ends behind one protocol each."""

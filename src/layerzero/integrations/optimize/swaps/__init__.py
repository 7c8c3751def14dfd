"""Another forward on a module: what it rests on, how it is put there and compared, and what it keeps."""

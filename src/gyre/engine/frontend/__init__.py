"""The event loop's half of the engine: admission, request streams."""

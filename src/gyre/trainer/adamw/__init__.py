"""The arithmetic of AdamW, in float32 and with 8-bit moments."""

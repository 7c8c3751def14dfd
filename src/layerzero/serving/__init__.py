"""What a deployment needs: warmup."""

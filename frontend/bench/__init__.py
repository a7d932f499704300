"""The client side of Foreword's benchmark: what it measures is any server of the OpenAI chat API."""

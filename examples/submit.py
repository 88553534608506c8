"""Submit a few items and print their results; needs a broker and a worker for the model `tiny`."""

from zfabric import Client, Item, Shape

shape = Shape.of("tiny", "You are terse.", "Q: 2+2? A: 4")
items = [Item(shape, f"question {k}".encode(), length=8 + k, custom_id=f"q-{k}") for k in range(5)]

with Client(name="example") as client:
    for result in client.map(items, buffersize=1_000, ordered=True):
        print(result.custom_id, result.status, result.payload.decode())

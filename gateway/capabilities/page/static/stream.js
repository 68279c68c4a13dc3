// Server-sent events in the response to a POST request, which EventSource does not support.

/** Yield `{event, data}` as they arrive (WHATWG HTML, section 9.2). */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (buffered + value).split("\n\n");
      buffered = blocks.pop();
      yield* blocks.map(parseEvent);
    }
  } finally {
    await reader.cancel(); // cancels an inference in progress
  }
}

function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return { event, data: data.join("\n") };
}

// Server-sent events of an answer to a POST, which EventSource cannot send.

/** Yields `{event, data}` as they come (WHATWG HTML, section 9.2). */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (held + value).split("\n\n");
      held = blocks.pop();
      yield* blocks.map(parsed);
    }
  } finally {
    await reader.cancel(); // which ends the inference, if it is not over
  }
}

function parsed(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return { event, data: data.join("\n") };
}

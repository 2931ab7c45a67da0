// Answers of the server: streams of events, and errors in words.

export class Failure extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

export async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch { /* the body of a proxy's error is no JSON */ }
  const message = error.message ?? `The server answered with status ${response.status}.`;
  return new Failure(message, { ...error, status: response.status });
}

// The browser says "Failed to fetch" or "network error".
export async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new Failure("The server cannot be reached, or the connection broke.") : error;
  }
}

// The JSON of server-sent events, up to [DONE].
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) throw new Failure("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

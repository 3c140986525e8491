// Questions to the catalog. The token is kept for this tab alone and goes nowhere but into the Authorization header.

const KEY = "kvbm.token";
const BASE = new URL("../", document.baseURI);
const ASK_S = 30;
const SILENT_S = 20;
const MOST_BUFFER = 64 << 20;

export class AskError extends Error {
  constructor(status, code, message, remedy, retryS = 0) {
    super(message);
    Object.assign(this, { status, code, remedy, retryS });
  }
}

const held = { token: "" };
try { held.token = sessionStorage.getItem(KEY) || ""; } catch { /* storage is off: the token lives as long as the page */ }

export const hasToken = () => held.token !== "";

export function keepToken(token) {
  held.token = token.trim();
  try {
    if (held.token) sessionStorage.setItem(KEY, held.token);
    else sessionStorage.removeItem(KEY);
  } catch { /* as above */ }
}

// Whether it was forgotten, or another was given, by a document that was in this tab meanwhile.
export function isTokenOld() {
  try { return (sessionStorage.getItem(KEY) || "") !== held.token; } catch { return false; }
}

function headers(more) {
  const token = /^[\x21-\x7e]+$/.test(held.token) ? held.token : "";
  return token ? { ...more, authorization: `Bearer ${token}` } : { ...more };
}

async function failure(answer) {
  let error = {};
  try { error = (await answer.json()).error || {}; } catch { /* no JSON: a proxy's answer */ }
  const message = error.message || `the catalog answered ${answer.status}`;
  return new AskError(answer.status, error.code || "", message, error.what_to_do || "", Number(answer.headers.get("retry-after")) || 0);
}

const away = (error) => (error instanceof AskError ? error : new AskError(0, "away", "the catalog cannot be reached", "see whether it runs, and whether this machine reaches it"));

export async function ask(path, body) {
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), ASK_S * 1000);
  try {
    const options = { headers: headers(body === undefined ? {} : { "content-type": "application/json" }), signal: stop.signal, credentials: "same-origin", cache: "no-store" };
    const answer = await fetch(new URL(path, BASE), body === undefined ? options : { ...options, method: "POST", body: JSON.stringify(body) });
    if (!answer.ok) throw await failure(answer);
    return await answer.json();
  } catch (error) {
    throw stop.signal.aborted ? new AskError(0, "too_slow", `the catalog has not answered within ${ASK_S} s`, "ask again") : away(error);
  } finally {
    clearTimeout(timer);
  }
}

// Read a feed until it ends. Each event goes to `take(kind, data)`. Raises AskError.
export async function feed(path, take, signal) {
  const stop = new AbortController();
  const end = () => stop.abort();
  signal.addEventListener("abort", end);
  let timer = setTimeout(end, SILENT_S * 1000);
  try {
    const answer = await fetch(new URL(path, BASE), { headers: headers({ accept: "text/event-stream" }), signal: stop.signal, credentials: "same-origin", cache: "no-store" });
    if (!answer.ok) throw await failure(answer);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let parts = [], size = 0;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(end, SILENT_S * 1000);
      // An event may come in many pieces: they are joined once, when its end has come.
      if (!value.includes("\n") && size + value.length < MOST_BUFFER) { parts.push(value); size += value.length; continue; }
      const events = (parts.join("") + value).split("\n\n");
      const rest = events.pop();
      parts = [rest]; size = rest.length;
      if (size > MOST_BUFFER) throw new AskError(0, "too_long", "an event of the feed is too long", "report it");
      for (const event of events) {
        let kind = "message";
        const data = [];
        for (const line of event.split("\n")) {
          if (line.startsWith("event: ")) kind = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) take(kind, JSON.parse(data.join("\n")));
      }
    }
  } catch (error) {
    if (signal.aborted) return;
    throw away(error);
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", end);
    stop.abort();
  }
}

// One question at a time, always the newest: what was asked before and is not asked yet is dropped, and so is an answer
// that comes after `drop`.
export class Newest {
  constructor(show, fail) {
    Object.assign(this, { show, fail, busy: false, waiting: null, serial: 0 });
  }

  ask(work) {
    if (this.busy) { this.waiting = work; return; }
    this.run(work);
  }

  drop() {
    this.serial += 1;
    this.waiting = null;
  }

  async run(work) {
    this.busy = true;
    const serial = this.serial;
    try {
      const answer = await work();
      if (serial === this.serial) this.show(answer);
    } catch (error) {
      if (!(error instanceof AskError)) throw error;
      if (serial === this.serial && !this.waiting) this.fail(error);
    } finally {
      this.busy = false;
      const next = this.waiting;
      this.waiting = null;
      if (next) this.run(next);
    }
  }
}

export const question = (path, values) => {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) if (value !== null && value !== undefined && value !== "") asked.set(name, value);
  const text = asked.toString();
  return text ? `${path}?${text}` : path;
};

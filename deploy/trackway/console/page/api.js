// Requests of the page. Addresses are relative, so the console also works below a prefix.

const TOKEN = "trackway-token";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A reply of the console. Raises ApiError with the server's message, also when there is no answer. */
export async function get(path, parameters = {}, { signal, tag } = {}) {
  const response = await request(path, parameters, { signal, headers: tag ? { "if-none-match": tag } : {} });
  if (response.status === 304) return { unchanged: true, tag };
  return { body: await response.json(), tag: response.headers.get("etag") };
}

/** A reply as the content of a file. Raises ApiError as `get` does. */
export const file = async (path, parameters) => (await request(path, parameters, { headers: {} })).blob();

/** The reply to a body. Raises ApiError as `get` does. */
export const post = async (path, body, { signal } = {}) =>
  (await request(path, {}, { signal, headers: { "content-type": "application/json" }, method: "POST", body: JSON.stringify(body) })).json();

/**
 * The address at which the browser itself saves a reply, which is then never held in memory; null with a token, which a link
 * does not send. Raises ApiError as `get` does.
 */
export async function saved(path, parameters) {
  if (sessionStorage.getItem(TOKEN)) return null;
  const controller = new AbortController();
  await request(path, parameters, { signal: controller.signal, headers: {} });
  controller.abort();
  return address(path, parameters);
}

function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === undefined || value === null || value === "") continue;
    for (const part of Array.isArray(value) ? value : [value]) query.append(name, part);
  }
  return `api/${path}?${query}`;
}

async function request(path, parameters, { signal, headers, ...rest }) {
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(address(path, parameters), { signal, headers, cache: "no-store", ...rest });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The console does not answer; start it again with `trackway console`.");
  }
  if (response.ok || response.status === 304) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `The console answered ${response.status}.`);
}

export const keepToken = (token) => sessionStorage.setItem(TOKEN, token);

const SHORT = { validation: "val" };

/** The page's address of a view: link("step", {run, step}) is "#/step?run=...&step=...". */
export function link(view, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === undefined || value === null || value === "" || value === false) continue;
    query.append(SHORT[name] ?? name, value === true ? 1 : value);
  }
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

/** The view and the parameters of an address. */
export function route(hash) {
  const [view, query] = hash.replace(/^#\/?/, "").split("?");
  return { view: view || "runs", parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** Query of a trajectory at the server, from an address of the page. */
export const addressed = ({ run, step, val, sample, rollout }) => ({ run, step, validation: val ? true : undefined, sample, rollout });

export const MOST_COMPARED = 8;

/** The comparison of the first eight of these trajectories; an address may name a run of its own. */
export const compareLink = (run, addresses) => link("compare", { run, of: addresses.slice(0, MOST_COMPARED).map((address) =>
  `${address.validation ? "v" : ""}${address.step}/${encodeURIComponent(address.sample)}/${address.rollout}${(address.run ?? run) === run ? "" : `/${encodeURIComponent(address.run)}`}`).join(",") });

export const trajectoryLink = (view, run, address) =>
  link(view, { run, step: address.step, validation: address.validation, sample: address.sample, rollout: address.rollout });

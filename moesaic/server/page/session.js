// Requests with the key of this tab, and the dialog that asks for it.

import { byId } from "./dom.js";

const KEY = "moesaic-key";

export function authorised(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers });
}

export const refused = (response) => response.status === 401 || response.status === 403;

let asking = null;

// Resolves to whether the user gave a key.
export function askForKey() {
  asking ??= openDialog().finally(() => { asking = null; });
  return asking;
}

function openDialog() {
  const dialog = byId("key-dialog");
  const field = byId("key");
  if (sessionStorage.getItem(KEY)) byId("key-message").textContent = "The server refused that key. Try another.";
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "given" && field.value !== "";
      if (given) sessionStorage.setItem(KEY, field.value);
      resolve(given);
    }, { once: true });
  });
}

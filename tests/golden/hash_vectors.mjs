// Computes every case of kvbm's hash_vectors.json from its inputs and compares.
//   node hash_vectors.mjs hash_vectors.json
import { createHash, createHmac } from "node:crypto";
import { readFileSync } from "node:fs";

// The eleven fields of a namespace, sorted as the canonical form has them.
const FIELDS = ["block_tokens", "kv_dtype", "kv_group", "layout", "lora", "model", "ranks",
  "revision", "scheme", "scheme_seed", "tenant"];
const INTEGERS = ["block_tokens", "kv_group", "scheme_seed"]; // the others are texts

// Buffer.from would silently stop at the first bad digit.
function bytes(hex) {
  if (!/^([0-9a-f]{2})*$/.test(hex)) throw new Error(`not hexadecimal: ${hex}`);
  return Buffer.from(hex, "hex");
}

const first16 = (hash) => hash.digest().subarray(0, 16);

function sha256(...parts) {
  const hash = createHash("sha256");
  for (const part of parts) hash.update(part); // texts count as UTF-8
  return first16(hash);
}

// JSON.stringify escapes texts just as the canonical form wants it. A seed beyond 2**53 has to
// come as a BigInt: a Number has lost digits by then (JSON.parse makes Numbers), so it is refused.
function canonicalForm(fields) {
  const members = FIELDS.map((name) => {
    const value = fields[name];
    const isInteger = typeof value === "bigint" || Number.isSafeInteger(value);
    if (isInteger !== INTEGERS.includes(name)) throw new Error(`${name}: wrong type`);
    if (!isInteger && typeof value !== "string") throw new Error(`${name}: wrong type`);
    return `"${name}":${isInteger ? value : JSON.stringify(value)}`;
  });
  return `{${members.join(",")}}`;
}

const namespaceId = (canonical) => sha256("kvbm.namespace.v1\0", canonical);

const namespaceRoot = (canonical, secret) =>
  first16(createHmac("sha256", secret).update("kvbm.root.v1\0").update(canonical));

function blockHashes(root, blockTokens, tokens, extraKeys) {
  const hashes = [];
  let parent = root;
  for (let begin = 0; begin + blockTokens <= tokens.length; begin += blockTokens) {
    const block = Buffer.alloc(4 * blockTokens);
    for (let i = 0; i < blockTokens; i++) block.writeUInt32LE(tokens[begin + i], 4 * i);
    parent = sha256(parent, block, extraKeys[hashes.length] ?? "");
    hashes.push(parent);
  }
  return hashes;
}

const sameList = (hashes, expected) =>
  hashes.length === expected.length && hashes.every((h, i) => h.toString("hex") === expected[i]);

function checkNamespace(fields, { canonical, id, secret, root }) {
  const text = canonicalForm(fields);
  return text === canonical
    && sameList([namespaceId(text), namespaceRoot(text, bytes(secret))], [id, root]);
}

const checks = {
  namespaces(one) {
    return checkNamespace(one.fields, one);
  },
  seeds(one) { // a text there, which no JSON.parse has rounded
    return checkNamespace({ ...one.fields, scheme_seed: BigInt(one.fields.scheme_seed) }, one);
  },
  prompts({ root, block_tokens, tokens, extra_keys, hashes }) {
    if (!(block_tokens >= 1)) throw new Error("block_tokens must be at least 1");
    const extraKeys = extra_keys.map(bytes);
    return sameList(blockHashes(bytes(root), block_tokens, tokens, extraKeys), hashes);
  },
  derived({ root, digests, hashes }) {
    return sameList(digests.map((digest) => sha256(bytes(root), bytes(digest))), hashes);
  },
};

const vectors = JSON.parse(readFileSync(process.argv[2], "utf8"));
for (const [kind, check] of Object.entries(checks)) {
  const cases = vectors[kind];
  const wrong = cases.filter((one) => {
    try {
      return !check(one);
    } catch {
      return true; // an input that cannot be right
    }
  });
  console.log(`${kind}: ${cases.length - wrong.length} of ${cases.length} right`);
  for (const { name } of wrong) console.log(`  wrong: ${name}`);
  if (wrong.length > 0 || cases.length === 0) process.exitCode = 1; // no cases prove nothing
}

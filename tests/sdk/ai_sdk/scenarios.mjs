// Vercel's AI SDK against a server: `node scenarios.mjs URL MODEL PROVIDER SCENARIO` prints the result as JSON.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, provider, scenario] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const model = {
  chat: () => openai.chat(name),
  responses: () => openai.responses(name),
  anthropic: () => createAnthropic({ baseURL: url, apiKey: "none" })(name),
  compatible: () => createOpenAICompatible({ name: "server", baseURL: url, supportsStructuredOutputs: true })(name),
}[provider]();

const city = z.enum(["Paris", "Rome"]);
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city }),
  execute: async ({ city }) => ({ city, sunny: true }),
});
const oneCall = { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true }, server: { parallel_tool_calls: false } };
const forced = {
  model, tools: { weather }, toolChoice: "required", temperature: 0, maxOutputTokens: 60, stopWhen: stepCountIs(1), maxRetries: 0,
  providerOptions: oneCall,
};

const scenarios = {
  async text() {
    const answer = await generateText({ model, system: "Be brief.", prompt: "Hi", maxOutputTokens: 20, maxRetries: 0 });
    return { text: answer.text, usage: answer.usage, finish: answer.finishReason };
  },
  async stream() {
    const answer = streamText({ model, prompt: "Hi", maxOutputTokens: 20, maxRetries: 0 });
    const parts = [];
    for await (const part of answer.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") parts.push(part.text);
    }
    return { parts, text: await answer.text, finish: await answer.finishReason };
  },
  async object() {
    const schema = z.object({ city, sunny: z.boolean() });
    return (await generateObject({ model, schema, prompt: "It is sunny in Paris.", maxOutputTokens: 100, maxRetries: 0 })).object;
  },
  // Each turn sends back what the client kept of the turns before; the provider of the Responses API refers to stored items.
  async turns() {
    const messages = [{ role: "user", content: "What is the weather in Paris?" }];
    const calls = [];
    for (let turn = 0; turn < 2; turn++) {
      const answer = await generateText({ ...forced, messages });
      messages.push(...answer.response.messages);
      calls.push({ calls: answer.toolCalls.length, results: answer.toolResults.map((one) => one.output) });
    }
    messages.push({ role: "user", content: "Thanks." });
    const last = await generateText({ ...forced, toolChoice: "none", messages });
    return { calls, text: last.text, warnings: last.warnings ?? [] };
  },
  async toolStream() {
    const answer = streamText({ ...forced, prompt: "What is the weather in Paris?" });
    const kinds = [];
    for await (const part of answer.fullStream) {
      if (part.type === "error") throw part.error;
      kinds.push(part.type);
    }
    return { kinds, input: (await answer.toolCalls)[0].input };
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));

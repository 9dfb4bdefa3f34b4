export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

export interface CloudEvent {
  specversion: string;
  id: string;
  source: string;
  type: string;
  subject?: string;
  data?: any;
  [attribute: string]: any;
}

export class VirtaError extends Error {
  readonly code: string;
  readonly status: number;
  constructor(message: string, details?: { code?: string; status?: number });
}

export interface Published {
  durability: string;
  offset: number | null;
  duplicate: boolean;
}

export interface ResumeOptions {
  reconnect?: boolean;
  onError?: (error: Error) => void;
}

export interface SubscribeOptions extends ResumeOptions {
  from?: string | number | null;
  lastEventId?: string | null;
  onGap?: (gap: { reason: string; [name: string]: any }) => void;
}

export interface LiveOptions extends ResumeOptions {
  filter?: string | object;
  dialect?: "query-string" | "koncorde" | "cesql" | "cloudevents";
  key?: string;
  row?: "auto" | "event";
  fields?: string;
  select?: string;
  group?: string;
  since?: string | null;
}

export interface LiveChange {
  kind: "snapshot" | "row" | "live" | "enter" | "update" | "leave" | "reset" | "aggregate";
  key?: string;
  offset?: number;
  event?: CloudEvent;
  reason?: string;
  rows?: number;
  groups?: Group[];
  gone?: Json[];
}

export interface Group {
  group: Json;
  count?: number;
  [name: string]: any;
}

export class Client {
  constructor(url?: string, options?: { token?: string | null; fetch?: typeof fetch });
  readonly url: string;
  readonly jobs: Jobs;
  publish(channel: string, ...events: (CloudEvent | Json)[]): Promise<Published>;
  subscribe(channel: string, query?: string, options?: SubscribeOptions): Subscription;
  live(channel: string, query?: string, options?: LiveOptions): LiveView;
  request(
    method: string,
    path: string,
    options?: { headers?: Record<string, string>; body?: BodyInit; signal?: AbortSignal },
  ): Promise<Response>;
}

export interface Frame {
  event: string;
  data: string;
  id: string | null;
  retry: number | null;
}

export class FrameReader {
  feed(text: string): Frame[];
}

declare class Resuming {
  lastEventId: string | null;
  readonly closed: boolean;
  close(): void;
}

export class Subscription extends Resuming implements AsyncIterable<{ event: CloudEvent; id: string }> {
  [Symbol.asyncIterator](): AsyncIterator<{ event: CloudEvent; id: string }>;
}

export class LiveView extends Resuming {
  readonly rows: Map<string, CloudEvent>;
  readonly groups: Map<Json, Group>;
  readonly isLive: boolean;
  readonly error: Error | null;
  readonly finished: Promise<void>;
  subscribe(run: (rows: Map<string, CloudEvent>) => void): () => void;
  on(run: (change: LiveChange) => void): () => void;
  ready(): Promise<LiveView>;
}

export class Jobs {
  push(uri: string, options?: { domain?: string; priority?: number; start?: number; delay?: number; payload?: Json }): Promise<any>;
  next(options?: { domain?: string; count?: number; work_for?: number; remove?: boolean; wait?: number }): Promise<any>;
  done(key: string): Promise<any>;
  extend(key: string, seconds: number): Promise<any>;
  giveBack(key: string): Promise<any>;
  fail(key: string, options?: { reason?: string; delay?: number; traceback?: string; dead?: boolean }): Promise<any>;
}
